"""`offloadkit demo`: a small T5 learns, from random weights, to write dates in ISO form."""
