"""From a Hugging Face checkpoint to bit-sliced weights. Needs torch."""
