"""A fleet on a Ray cluster: the actors around workers and routers, and starting and stopping them together."""
