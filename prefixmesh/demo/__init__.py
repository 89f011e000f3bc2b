"""The demonstration: a customer-service workload of two tenants, an oracle of what a cache could save, and their summary."""
