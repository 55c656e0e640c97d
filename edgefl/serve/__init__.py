"""Exported bundles behind the Open Inference Protocol, over HTTP and MQTT. No torch."""
