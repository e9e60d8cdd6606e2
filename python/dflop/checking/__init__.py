"""`dflop check`: what dflop makes of a user's model and samples, beside what Hugging Face makes of them."""
