"""The gateway: guards programs in any language by standing between them and their model provider."""
