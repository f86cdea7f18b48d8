"""The transfer study of `tackboard bench quality` compares a pretrained model with a model trained from scratch."""
