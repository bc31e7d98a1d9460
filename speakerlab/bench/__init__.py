"""Measure this machine: its limits, the speed of models and data, and what a run would fit."""
