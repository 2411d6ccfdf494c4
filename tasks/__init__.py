"""Pipeline stages: each module turns artifacts into one artifact (see `tasks.stage`)."""
