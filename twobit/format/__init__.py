"""The on-disk format: bit layout, manifest, writer and reader. FORMAT.md is the normative text."""
