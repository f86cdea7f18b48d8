"""Raw logs of any shape in, canonical Arrow events out; synthetic worlds with known ground truth beside them."""
