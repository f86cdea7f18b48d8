"""This package turns raw logs of any shape into canonical Arrow events, and makes synthetic worlds with known truth."""
