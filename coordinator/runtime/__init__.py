"""The coordinator's shell: event loop, MQTT, files and the evaluator process."""
