"""Regions compiled by Inductor and AOTInductor, in processes of their own."""
