//! The head loss as it trains: chunked, loss and gradient in one go, logits of all heads never materialised.
