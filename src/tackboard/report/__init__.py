"""Charts and pages: numbers in, one self-contained HTML file out. No plotting library, no script, no network."""
