"""The supervisor's shell: MQTT, transfers, files and the trainer process."""
