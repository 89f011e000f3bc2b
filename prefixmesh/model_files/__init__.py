"""A model as files: where they are, what they say, which revision they are. No torch; weights are the worker's business."""
