//! The acceptance rule of a request, and the fields that have no effect under it.

use std::num::NonZeroUsize;

use super::api::error::ApiError;
use super::api::request::{AcceptanceChoice, TextRequest};
use crate::numbers::{NonNegative, Probability};
use crate::tree::accept::{Acceptance, TypicalAcceptance};

/// The rules of a server.
#[derive(Debug, Clone, Copy)]
pub struct AcceptanceRules {
    /// Where a request does not choose; `None` without a drafter: there are no guesses to accept.
    pub server_rule: Option<Acceptance>,
    /// For requests that choose it.
    pub typical: TypicalAcceptance,
}

impl AcceptanceRules {
    /// The rule that a request chooses.
    pub(super) fn chosen(&self, request: &TextRequest) -> Option<Acceptance> {
        request.acceptance.map(|choice| match choice {
            AcceptanceChoice::Rejection => Acceptance::Rejection,
            AcceptanceChoice::Typical => Acceptance::Typical(self.typical),
            AcceptanceChoice::Greedy => Acceptance::Greedy,
        })
    }

    /// Refuses fields that would have no effect: a rule without guesses, what selects among tokens that are never drawn, and a number of equal answers. At temperature
    /// 0 nothing is drawn under any rule, and as in OpenAI's API and vLLM such fields are accepted.
    ///
    /// # Errors
    /// [`ApiError`] names the field.
    pub(super) fn check(&self, request: &TextRequest) -> Result<(), ApiError> {
        let chosen = self.chosen(request);
        let Some(server_rule) = self.server_rule else { return without_guesses(chosen) };
        let rule = chosen.unwrap_or(server_rule);
        let sampling = request.sampling;
        let Some(name) = name_of_greedy(rule).filter(|_| sampling.temperature != NonNegative::ZERO) else {
            return Ok(());
        };
        let fields = [
            ("temperature", rule == Acceptance::Greedy && sampling.temperature != NonNegative::ONE),
            ("top_p", sampling.top_p != Probability::ONE),
            ("top_k", sampling.top_k.is_some()),
            ("seed", request.seed.is_some()),
            ("n", request.samples > NonZeroUsize::MIN),
        ];
        match fields.into_iter().find(|(_, is_given)| *is_given) {
            Some((field, _)) => {
                let problem = format!(
                    "has no effect with acceptance \"{name}\", which draws no token; leave it out, or send acceptance \"rejection\""
                );
                Err(ApiError::invalid(field, problem))
            }
            None => Ok(()),
        }
    }
}

fn without_guesses(chosen: Option<Acceptance>) -> Result<(), ApiError> {
    match chosen.and_then(name_of_greedy) {
        Some(name) => {
            let problem = format!(
                "\"{name}\" has no effect: this server has no drafter whose guesses it could accept; leave it out"
            );
            Err(ApiError::invalid("acceptance", problem))
        }
        None => Ok(()),
    }
}

/// The name of a rule that draws no token and is chosen by requests.
fn name_of_greedy(rule: Acceptance) -> Option<&'static str> {
    match rule {
        Acceptance::Greedy => Some("greedy"),
        Acceptance::Typical(_) => Some("typical"),
        Acceptance::Nucleus | Acceptance::Rejection | Acceptance::Forced { .. } => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// What is wrong with a request of these fields, if anything.
    fn refused(server_rule: Option<Acceptance>, more: &Value) -> Option<String> {
        let mut body = json!({"model": "m", "prompt": "hi"});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let request = TextRequest::completion(body.to_string().as_bytes()).expect("a request");
        let rules = AcceptanceRules { server_rule, typical: TypicalAcceptance::default() };
        rules.check(&request).err().map(|error| error.to_string())
    }

    #[test]
    fn without_a_drafter_a_rule_that_differs_from_plain_decoding_is_refused() {
        for (rule, temperature) in [("greedy", 1.5), ("typical", 1.0), ("greedy", 0.0)] {
            let message = refused(None, &json!({"acceptance": rule, "temperature": temperature})).expect("an error");
            let expected = format!(
                "acceptance: \"{rule}\" has no effect: this server has no drafter whose guesses it could accept; leave it out"
            );
            assert_eq!(message, expected);
        }
        for plain in
            [json!({}), json!({"acceptance": null}), json!({"acceptance": "rejection", "seed": 1, "top_p": 0.5})]
        {
            assert_eq!(refused(None, &plain), None, "{plain}");
        }
    }

    #[test]
    fn what_selects_among_drawn_tokens_is_refused_where_none_is_drawn() {
        let typical = Acceptance::Typical(TypicalAcceptance::default());
        for (server_rule, rule) in
            [(Acceptance::Rejection, json!("typical")), (typical, Value::Null), (typical, json!("greedy"))]
        {
            for (field, value) in [("top_p", json!(0.1)), ("top_k", json!(5)), ("seed", json!(1)), ("n", json!(2))] {
                let message = refused(Some(server_rule), &json!({"acceptance": rule, field: value})).expect("an error");
                assert!(message.starts_with(&format!("{field}: has no effect with acceptance \"")), "{message}");
                for effective in [
                    json!({"acceptance": "rejection", field: value}),
                    json!({"acceptance": rule, field: value, "temperature": 0}),
                    json!({"acceptance": rule, "top_p": 1, "top_k": -1, "seed": null}),
                ] {
                    assert_eq!(refused(Some(server_rule), &effective), None, "{effective}");
                }
            }
        }
    }

    #[test]
    fn a_temperature_has_an_effect_with_typical_and_none_with_greedy_acceptance() {
        let refused_rule =
            |rule: &str| refused(Some(Acceptance::Rejection), &json!({"acceptance": rule, "temperature": 1.5}));
        assert_eq!(refused_rule("typical"), None);
        let expected = "temperature: has no effect with acceptance \"greedy\", which draws no token; leave it out, or send acceptance \
                        \"rejection\"";
        assert_eq!(refused_rule("greedy").as_deref(), Some(expected));
    }
}
