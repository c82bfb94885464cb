"""Backbones and the LightningModule around them; nothing here knows ranks or devices."""
