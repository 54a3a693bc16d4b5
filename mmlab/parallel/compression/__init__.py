"""Compressed sums of gradients: codecs, the exchange that carries them, and what is kept between steps."""
