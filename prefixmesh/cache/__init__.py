"""What is stored: radix tree, pages, eviction, fingerprints, namespaces. No torch, no I/O, no clock."""
