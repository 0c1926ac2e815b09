"""How engines compare, what larger batches cost, what offloading costs: measured in fresh processes, drawn, saved."""
