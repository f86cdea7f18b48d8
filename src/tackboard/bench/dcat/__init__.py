"""`tackboard bench dcat`: early fusion with the context read once per user, beside whole sequences per candidate."""
