//! Attention of blocks, forward and backward, piece by piece.

use kyklos::backend::{
    Attend, AttendBackward, BiasInput, Control, DeviceClass, Operand, Results, StateShape, yield_now,
};
use kyklos::{BiasKind, BlockWork, Dtype, Result};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::pieces::{Pieces, Size, Taken};
use super::places::{extents, is_empty, name, place, placed};
use super::{TorchBackend, TorchBuffer};

/// What both directions know of a block.
struct BlockOf<'a> {
    dtype: Dtype,
    scale: f32,
    softcap: Option<f32>,
    /// q, k, v.
    operands: [Operand<'a, TorchBuffer>; 3],
    kv_head_of: &'a [u32],
    work: &'a BlockWork,
    bias: Option<BiasInput<'a, TorchBuffer>>,
    inference: bool,
}

impl TorchBackend {
    /// Attends into a state, or into results.
    pub(super) async fn attend_into(
        &self,
        args: Attend<'_, TorchBuffer>,
        results: Option<Results<'_, TorchBuffer>>,
        control: &Control,
    ) -> Result<()> {
        let Attend { dtype, scale, softcap, q, k, v, kv_head_of, work, bias, inference, state, .. } = args;
        let shape = state.shape;
        if is_empty(shape) || work.is_empty() && results.is_none() {
            return control.piece_done();
        }
        let terms = terms_of_pair(bias.as_ref(), shape);
        let of = BlockOf { dtype, scale, softcap, operands: [q, k, v], kv_head_of, work, bias, inference };
        let (block, into) = self.with(|py, device| {
            let ml = state.ml.tensor_mut(py)?.clone();
            let (is_empty, a) = state.a.overwrite(py)?;
            let results = match results {
                Some(Results { sinks, o, lse }) => Some((
                    sinks.to_vec(),
                    name(dtype),
                    o.tensor_mut(py)?.clone(),
                    lse.tensor_mut(py)?.clone(),
                )),
                None => None,
            };
            let into = device.call_method1("running", (a, ml, extents(shape), is_empty, results))?;
            Ok((Self::block(py, device, shape, &of)?.unbind(), into.unbind()))
        })?;
        let pieces = self.pieces(work, shape, 2, terms);
        let attend = |py: Python<'_>, device: &Bound<'_, PyAny>, piece: &Taken| {
            let args = (block.bind(py), into.bind(py), piece.part, piece.is_alone);
            device.call_method1("attend", args).map(drop)
        };
        self.in_pieces(pieces, control, attend).await?;
        self.with(|py, _| into.bind(py).call_method0("end").map(drop))
    }

    /// Adds the gradients of a block.
    pub(super) async fn gradients_of(
        &self,
        args: AttendBackward<'_, TorchBuffer>,
        control: &Control,
    ) -> Result<()> {
        let AttendBackward { dtype, scale, softcap, q, k, v, kv_head_of, work, bias, shape, .. } = args;
        if is_empty(shape) || work.is_empty() {
            return control.piece_done();
        }
        let terms = terms_of_pair(bias.as_ref(), shape);
        let of =
            BlockOf { dtype, scale, softcap, operands: [q, k, v], kv_head_of, work, bias, inference: false };
        let kv_heads = kv_head_of.iter().max().map_or(0, |head| *head as usize + 1);
        let (block, gradients) = self.with(|py, device| {
            let block = Self::block(py, device, shape, &of)?;
            let d_bias = match args.d_bias {
                Some(sum) => Some((sum.buffer.tensor_mut(py)?.clone(), place(sum.layout), sum.columns)),
                None => None,
            };
            let args = (
                &block,
                extents(shape),
                placed(py, &args.d_o)?,
                placed(py, &args.stats)?,
                args.dq.tensor_mut(py)?,
                args.dk.tensor_mut(py)?,
                args.dv.tensor_mut(py)?,
                (kv_heads, place(args.kv_layout)),
                d_bias,
            );
            let gradients = device.call_method1("gradients", args)?;
            Ok((block.unbind(), gradients.unbind()))
        })?;
        let pieces = self.pieces(work, shape, 5, terms);
        let attend = |py: Python<'_>, device: &Bound<'_, PyAny>, piece: &Taken| {
            device.call_method1("attend_backward", (block.bind(py), gradients.bind(py), piece.part)).map(drop)
        };
        self.in_pieces(pieces, control, attend).await
    }

    /// A block of queries and keys as the Python code has it.
    fn block<'py>(
        py: Python<'py>,
        device: &Bound<'py, PyAny>,
        shape: StateShape,
        of: &BlockOf<'_>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let words = |words: &[u32]| PyBytes::new(py, bytemuck::cast_slice(words)).unbind();
        let spans: Vec<_> =
            of.work.classes.iter().map(|class| PyBytes::new(py, bytemuck::cast_slice(&class.rows))).collect();
        let bias = match &of.bias {
            Some(bias) => {
                Some((bias.kind == BiasKind::Mask, bias.buffer.tensor(py)?.clone(), place(bias.layout)))
            }
            None => None,
        };
        let [q, k, v] = of.operands.each_ref();
        let [q, k, v] = [placed(py, q)?, placed(py, k)?, placed(py, v)?];
        let numbers = (of.scale, of.softcap, of.inference);
        device.call_method1(
            "block",
            (
                name(of.dtype),
                extents(shape),
                q,
                k,
                v,
                of.kv_head_of.to_vec(),
                numbers,
                words(&of.work.kv_positions),
                spans,
                bias,
            ),
        )
    }

    /// The pieces of a block with `products` matrix products and `terms` of a bias for each pair.
    fn pieces(&self, work: &BlockWork, shape: StateShape, products: usize, terms: usize) -> Pieces {
        let size = match self.info.class {
            DeviceClass::Cpu => Size::OF_CPU,
            _ => Size::OF_GPU,
        };
        let of_pair = (products * shape.heads * shape.dim) as u64;
        Pieces::new(work, shape.batch, of_pair, terms as u64, size)
    }

    /// Attends piece by piece.
    async fn in_pieces(
        &self,
        mut pieces: Pieces,
        control: &Control,
        attend: impl Fn(Python<'_>, &Bound<'_, PyAny>, &Taken) -> PyResult<()>,
    ) -> Result<()> {
        while let Some(piece) = pieces.take() {
            self.with(|py, device| attend(py, device, &piece))?;
            control.piece_done()?;
            yield_now().await;
        }
        Ok(())
    }
}

/// How many terms a bias has for a pair of one batch entry: one for each head, or one for all.
fn terms_of_pair(bias: Option<&BiasInput<'_, TorchBuffer>>, shape: StateShape) -> usize {
    bias.map_or(0, |bias| if bias.layout.head_stride == 0 { 1 } else { shape.heads })
}
