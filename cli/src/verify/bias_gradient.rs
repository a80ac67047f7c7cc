//! Compares the gradient of a bias with the f64 oracle.

use kyklos::plan::PlanSet;
use kyklos_oracle::oracle::Gradients;
use kyklos_oracle::tolerance::NaiveGradients;

use super::Sample;
use super::gradients::GradientVerdict;
use crate::failure::Result;

impl Sample {
    /// Holds the gradient of the bias, `[batch, heads, queries or 1, keys]`, that the ranks of
    /// `shared` computed: all of it, or of its heads those that read the last KV head.
    pub(crate) fn judge_bias(&self, d_bias: &[f32], shared: &PlanSet) -> Result<GradientVerdict> {
        let kv = self.whole_kv()?;
        let rounded = kv.as_on_the_wire(shared);
        let (mut right, mut plain, mut slack, mut squares) = (Vec::new(), Vec::new(), Vec::new(), 0.0);
        for kv_head in self.heads_of_bias() {
            let [of_q, _] = self.head_parts(kv_head);
            let of_head = self.right_and_plain(kv_head, &self.given(of_q)?, &kv, &rounded)?;
            let NaiveGradients { gradients, scales, slack: of_slack } = of_head.plain;
            add(&mut right, of_head.right);
            add(&mut plain, gradients);
            add(&mut slack, of_slack);
            squares += scales[4].powi(2);
        }
        let [of_q, _] = self.head_parts(self.verified_head());
        let heads = self.problem.bias.map_or(1, |bias| bias.heads as usize);
        let actual: Vec<f32> = match heads {
            1 => d_bias.to_vec(),
            _ => {
                let batch = self.problem.bias.map_or(1, |bias| bias.batch as usize);
                let head = d_bias.len() / (batch * heads).max(1);
                let entries = d_bias.chunks_exact((heads * head).max(1));
                entries.flat_map(|entry| &entry[of_q.first * head..][..of_q.count * head]).copied().collect()
            }
        };
        let mut verdict = GradientVerdict::NONE;
        verdict.hold(self.problem.dtype, ("dbias", &actual), &right, (&plain, squares.sqrt(), &slack));
        Ok(verdict)
    }
}

fn add(sum: &mut Vec<f64>, Gradients { d_bias, .. }: Gradients) {
    sum.resize(d_bias.len(), 0.0);
    sum.iter_mut().zip(d_bias).for_each(|(sum, value)| *sum += value);
}
