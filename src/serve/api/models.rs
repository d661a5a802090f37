//! The list of models.

use serde_json::{Value, json};

/// A model as `GET /v1/models/{id}` shows it.
pub fn model(id: &str, created: u64) -> Value {
    json!({ "id": id, "object": "model", "created": created, "owned_by": "medusa" })
}

/// The models of `GET /v1/models`.
pub fn list(ids: &[String], created: u64) -> Value {
    let data: Vec<Value> = ids.iter().map(|id| model(id, created)).collect();
    json!({ "object": "list", "data": data })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_holds_models() {
        let one = json!({"id": "m", "object": "model", "created": 7, "owned_by": "medusa"});
        assert_eq!(model("m", 7), one);
        assert_eq!(list(&["m".to_owned()], 7), json!({"object": "list", "data": [one]}));
    }
}
