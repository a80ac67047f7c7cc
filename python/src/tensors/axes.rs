//! The axes of the arrays of a call, which are compared before an element is read.

use kyklos::{Dtype, Error, Result};

use crate::tensors::arrays::Elements;
use crate::tensors::kind::Kind;

/// An array of a call: what it is called in errors, the names of its axes, and its elements.
#[derive(Debug)]
pub(crate) struct Argument {
    name: &'static str,
    axes: Vec<&'static str>,
    pub(crate) elements: Elements,
}

/// What the axes of an array are.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Form {
    /// `[batch, tokens, heads, dim]`
    States,
    /// `[batch, tokens, heads]`, or `[batch, tokens, heads, 2]`.
    Numbers,
    /// `[batch or 1, tokens, heads or 1, keys]`, a row for each query of the rank.
    Bias,
    /// `[batch or 1, keys]` or `[batch or 1, heads or 1, keys]`, a row that all queries share.
    KeyBias,
}

impl Form {
    /// The name of the argument of a bias.
    pub(crate) fn bias_name(self) -> &'static str {
        if matches!(self, Self::KeyBias) { "key_bias" } else { "bias" }
    }
}

impl Argument {
    /// The array `name` of this form; with `heads_first` its axis of heads is before that of
    /// tokens.
    pub(crate) fn new(name: &'static str, form: Form, elements: Elements, heads_first: bool) -> Result<Self> {
        let mut axes = match form {
            Form::States => vec!["batch", "tokens", "heads", "dim"],
            Form::Numbers if elements.shape.len() == 4 && elements.shape[3] == 2 => {
                vec!["batch", "tokens", "heads", "pair"]
            }
            Form::Numbers => vec!["batch", "tokens", "heads"],
            Form::Bias => vec!["batch", "tokens", "heads", "keys"],
            Form::KeyBias if elements.shape.len() == 2 => vec!["batch", "keys"],
            Form::KeyBias => vec!["batch", "heads", "keys"],
        };
        if heads_first && !matches!(form, Form::KeyBias) {
            axes.swap(1, 2);
        }
        if elements.shape.len() != axes.len() {
            let remedy = match form {
                Form::States => format!("give it four axes, [{}]", axes.join(", ")),
                Form::Numbers => format!("give it the axes [{0}] or [{0}, 2]", axes.join(", ")),
                Form::Bias => format!("give it the axes [{}], 1 for those that share rows", axes.join(", ")),
                Form::KeyBias => {
                    "give it the axes [batch or 1, keys] or [batch or 1, heads, keys]".to_owned()
                }
            };
            return Err(Error::request(format!("{name} has the shape {:?}", elements.shape), remedy));
        }
        Ok(Self { name, axes, elements })
    }

    /// The extent of an axis; 1 if there is none.
    pub(crate) fn extent(&self, axis: &str) -> usize {
        self.axes.iter().position(|own| *own == axis).map_or(1, |index| self.elements.shape[index])
    }

    /// The array in words: its axes with their extents.
    fn shape_in_words(&self) -> String {
        let axes: Vec<String> = self
            .axes
            .iter()
            .zip(&self.elements.shape)
            .map(|(axis, extent)| format!("{axis} {extent}"))
            .collect();
        format!("[{}]", axes.join(", "))
    }

    /// Refuses other extents of `axes` than `other` has.
    fn equals(&self, other: &Self, axes: &[&str]) -> Result<()> {
        axes.iter().try_for_each(|axis| self.fits(other, axis, false, "give both the same"))
    }

    /// Refuses an extent that is not that of `other`, nor 1 where `shared`.
    fn fits(&self, other: &Self, axis: &str, shared: bool, remedy: &str) -> Result<()> {
        let [own, wanted] = [self.extent(axis), other.extent(axis)];
        if own == wanted || shared && own == 1 {
            return Ok(());
        }
        Err(Error::request(
            format!(
                "{} of shape {} has {axis} {own}, {} of shape {} has {axis} {wanted}",
                self.name,
                self.shape_in_words(),
                other.name,
                other.shape_in_words()
            ),
            remedy,
        ))
    }

    /// Refuses elements of another type than `kind`, which is that of `other`.
    fn is_of(&self, kind: Kind, other: &str) -> Result<()> {
        match self.elements.kind == kind {
            true => Ok(()),
            false => Err(Error::request(
                format!("{} has elements of {}, and {other} of {kind}", self.name, self.elements.kind),
                format!("convert it to {kind}"),
            )),
        }
    }
}

/// Refuses q, k and v that do not fit each other.
pub(crate) fn check_states([q, k, v]: [&Argument; 3]) -> Result<()> {
    k.equals(q, &["batch", "dim"])?;
    v.equals(k, &["batch", "tokens", "heads", "dim"])?;
    k.is_of(q.elements.kind, "q")?;
    v.is_of(q.elements.kind, "q")
}

/// Refuses outputs, or their gradients, that are not those of q: `o` like q, `lse` a number for
/// each row.
pub(crate) fn check_rows(q: &Argument, o: &Argument, lse: Option<&Argument>) -> Result<()> {
    o.equals(q, &["batch", "tokens", "heads", "dim"])?;
    o.is_of(q.elements.kind, "q")?;
    let Some(lse) = lse else { return Ok(()) };
    lse.equals(q, &["batch", "tokens", "heads"])?;
    lse.is_of(Kind::Number(Dtype::F32), "log-sum-exps are")
}

/// Refuses a bias that does not fit q. Its keys are those of all ranks, which compare them with
/// their votes.
pub(crate) fn check_bias(q: &Argument, bias: &Argument, form: Form) -> Result<()> {
    bias.fits(q, "batch", true, "give it the batch entries of q, or 1 for all")?;
    bias.fits(q, "heads", true, "give it the heads of q, or 1 for all")?;
    if matches!(form, Form::Bias) {
        let remedy = match bias.extent("tokens") {
            1 => "give it a row for each query of this rank; a row that all queries share is a key_bias",
            _ => "give it a row for each query of this rank",
        };
        bias.fits(q, "tokens", false, remedy)?;
    }
    if bias.elements.kind != Kind::Bool && bias.elements.kind != q.elements.kind {
        return Err(Error::request(
            format!("{} of {} for q of {}", bias.name, bias.elements.kind, q.elements.kind),
            "convert it to the type of q, or give a mask of bool",
        ));
    }
    Ok(())
}
