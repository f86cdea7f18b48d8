"""Quality metrics of rankings and of yes-or-no predictions."""
