"""The transfer study of `tackboard bench quality`: is a pretrained model better than one trained from scratch?"""
