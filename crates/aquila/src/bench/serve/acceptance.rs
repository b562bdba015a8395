//! What speculation did, where a server says so: with an answer, or in its metrics.

use serde_json::Value;

/// Counts of verifications and drafts.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SpecCounts {
    /// Verifications, each of which yields a token of its own.
    pub verifications: f64,
    /// Drafts that were right.
    pub correct: f64,
    /// Drafts that were verified; 0 where the server does not say.
    pub proposed: f64,
}

impl SpecCounts {
    /// Adds the counts of another.
    pub fn add(&mut self, other: &SpecCounts) {
        self.verifications += other.verifications;
        self.correct += other.correct;
        self.proposed += other.proposed;
    }

    /// Tokens per verification: 1 + correct drafts / verifications.
    pub fn accept_length(&self) -> Option<f64> {
        let tokens = self.correct + self.verifications;
        (self.verifications > 0.0).then(|| tokens / self.verifications)
    }

    /// The share of verified drafts that were right.
    pub fn accept_rate(&self) -> Option<f64> {
        (self.proposed > 0.0).then(|| self.correct / self.proposed)
    }

    /// What an event says: ours in its usage, SGLang's under `sglext` or in `meta_info`, vLLM's
    /// under `metrics`.
    pub fn in_event(event: &Value) -> Option<Self> {
        let sglang = [
            &event["usage"]["speculative"],
            &event["sglext"]["spec_tokens_details"],
            &event["choices"][0]["meta_info"],
            &event["meta_info"],
        ];
        let vllm = &event["metrics"]["speculative_decoding"];
        sglang.into_iter().find_map(Self::of_sglang).or_else(|| Self::of_vllm(vllm))
    }

    fn of_sglang(fields: &Value) -> Option<Self> {
        let number = |key: &str| fields[key].as_f64();
        let verifications = number("spec_verify_ct").filter(|&count| count > 0.0)?;
        // Without drafts, the length says how many were right.
        let by_length = || Some((number("spec_accept_length")? - 1.0) * verifications);
        let by_tokens = || Some((number("completion_tokens")? - verifications).max(0.0));
        let correct = number("spec_num_correct_drafts").or_else(by_length).or_else(by_tokens)?;
        let proposed = number("spec_num_proposed_drafts").unwrap_or(0.0);
        Some(Self { verifications, correct, proposed })
    }

    fn of_vllm(fields: &Value) -> Option<Self> {
        let number = |key: &str| fields[key].as_f64();
        Some(Self {
            verifications: number("num_spec_steps")?,
            correct: number("num_accepted_draft_tokens")?,
            proposed: number("num_draft_tokens").unwrap_or(0.0),
        })
    }

    /// What a page of Prometheus' counters says of the server since it started, under our names
    /// or vLLM's.
    pub fn in_metrics(page: &str) -> Option<Self> {
        let sum = |name: &str| {
            let mut values = page.lines().filter_map(|line| {
                let rest = line.strip_prefix(name)?;
                let value = match rest.strip_prefix('{') {
                    // A label's value may hold anything; what is counted comes last.
                    Some(labels) => labels.rsplit_once("} ")?.1,
                    None => rest.strip_prefix(' ')?,
                };
                value.split(' ').next()?.parse::<f64>().ok()
            });
            let first = values.next()?;
            Some(first + values.sum::<f64>())
        };
        let vllm = || {
            Some(Self {
                verifications: sum("vllm:spec_decode_num_drafts_total")?,
                correct: sum("vllm:spec_decode_num_accepted_tokens_total")?,
                proposed: sum("vllm:spec_decode_num_draft_tokens_total")?,
            })
        };
        let ours = || {
            Some(Self {
                verifications: sum("sglang:spec_verify_calls_total")?,
                proposed: sum("aquila:spec_proposed_drafts_total")?,
                correct: sum("aquila:spec_correct_drafts_total").unwrap_or(0.0),
            })
        };
        ours().or_else(vllm)
    }

    /// What SGLang's `/server_info` says: the average since the server started.
    pub fn in_server_info(info: &Value) -> Option<Self> {
        let average = info["internal_states"][0]["avg_spec_accept_length"].as_f64()?;
        let counts = Self { verifications: 1.0, correct: average - 1.0, proposed: 0.0 };
        (average >= 1.0).then_some(counts)
    }

    /// What came on top of counts of before.
    pub fn since(&self, before: &SpecCounts) -> Self {
        Self {
            verifications: self.verifications - before.verifications,
            correct: self.correct - before.correct,
            proposed: self.proposed - before.proposed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn each_server_says_acceptance_in_its_own_place() {
        let fields = json!({ "spec_verify_ct": 10, "spec_num_correct_drafts": 15,
            "spec_num_proposed_drafts": 30 });
        let vllm = json!({ "num_spec_steps": 10, "num_accepted_draft_tokens": 15,
            "num_draft_tokens": 30 });
        for event in [
            json!({ "usage": { "speculative": fields } }),
            json!({ "sglext": { "spec_tokens_details": fields } }),
            json!({ "choices": [{ "meta_info": fields }] }),
            json!({ "meta_info": fields }),
            json!({ "metrics": { "speculative_decoding": vllm } }),
        ] {
            let counts = SpecCounts::in_event(&event).unwrap();
            assert_eq!(counts.accept_length(), Some(2.5), "{event}");
            assert_eq!(counts.accept_rate(), Some(0.5), "{event}");
        }
        let old = json!({ "meta_info": { "spec_verify_ct": 4, "completion_tokens": 10 } });
        let old = SpecCounts::in_event(&old).unwrap();
        assert_eq!((old.accept_length(), old.accept_rate()), (Some(2.5), None));
        let plain = json!({ "choices": [], "usage": { "completion_tokens": 3 } });
        assert_eq!(SpecCounts::in_event(&plain), None);
    }

    #[test]
    fn counters_of_a_page_are_summed_over_their_labels() {
        let before = SpecCounts::in_metrics(
            "# TYPE sglang:spec_verify_calls_total counter\n\
             sglang:spec_verify_calls_total{model_name=\"a} 7\"} 10\n\
             aquila:spec_proposed_drafts_total{model_name=\"a\"} 30\n",
        )
        .unwrap();
        let after = SpecCounts::in_metrics(
            "sglang:spec_verify_calls_total{model_name=\"a\"} 20\n\
             aquila:spec_proposed_drafts_total{model_name=\"a\"} 60\n\
             aquila:spec_correct_drafts_total{model_name=\"a\",position=\"1\"} 9\n\
             aquila:spec_correct_drafts_total{model_name=\"a\",position=\"2\"} 6\n",
        )
        .unwrap();
        let counts = after.since(&before);
        assert_eq!((counts.accept_length(), counts.accept_rate()), (Some(2.5), Some(0.5)));
        let vllm = SpecCounts::in_metrics(
            "vllm:spec_decode_num_drafts_total{engine=\"0\"} 4.0\n\
             vllm:spec_decode_num_draft_tokens_total{engine=\"0\"} 12.0\n\
             vllm:spec_decode_num_accepted_tokens_total{engine=\"0\"} 6.0\n\
             vllm:spec_decode_num_accepted_tokens_per_pos_total{engine=\"0\",position=\"0\"} 4.0\n",
        );
        assert_eq!(vllm.unwrap().accept_length(), Some(2.5));
        assert_eq!(SpecCounts::in_metrics("python_info 1\n"), None);
        let info = json!({ "internal_states": [{ "avg_spec_accept_length": 2.5 }] });
        assert_eq!(SpecCounts::in_server_info(&info).unwrap().accept_length(), Some(2.5));
        let plain = json!({ "internal_states": [{ "avg_spec_accept_length": 0.0 }] });
        assert_eq!(SpecCounts::in_server_info(&plain), None);
    }
}
