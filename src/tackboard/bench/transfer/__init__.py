"""The transfer study of `tackboard bench quality`: is a pretrained model worth more than a fresh one?"""
