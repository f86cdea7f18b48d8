"""The bench of fine-tuning compares rankers that use a pretrained model in different ways, or not at all."""
