"""Rules by which other routers decide, written from their published descriptions, to be compared with ours on the same traces."""
