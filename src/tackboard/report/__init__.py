"""Turns numbers into charts and one self-contained HTML file, without a plotting library, a script or a network."""
