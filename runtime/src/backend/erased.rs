//! [`Backend`] as an object: the trait behind [`Device`](super::Device).

use std::any::Any;
use std::ops::Range;

use bytes::Bytes;
use futures_util::future::LocalBoxFuture;

use super::{
    Accuracy, Attend, AttendBackward, Backend, BiasGradient, BiasInput, Control, DeviceBuffer, DeviceInfo,
    Elements, Extent, KernelTime, Layout, Operand, Results, RowStats, State, StateMut, StateShape, Threaded,
};
use crate::error::Result;
use kyklos_plan::{AttentionProblem, Dtype, TileShape};

/// [`Backend`] without associated types.
pub(super) trait AnyBackend: Any + Threaded {
    fn info(&self) -> &DeviceInfo;
    fn supports(&self, dtype: Dtype, head_dim: usize) -> Result<()>;
    fn most_state_bytes(&self) -> Option<u64>;
    fn kernel(&self, dtype: Dtype, shape: StateShape) -> String;
    fn tile_shape(&self, problem: &AttentionProblem, shape: StateShape) -> TileShape;
    fn alloc(&self, label: &str, bytes: usize) -> Result<DeviceBuffer>;
    fn upload(&self, label: &str, data: Bytes) -> Result<DeviceBuffer>;
    fn write(&self, buffer: &mut DeviceBuffer, offset: usize, data: &[u8]) -> Result<()>;
    fn share(&self, buffer: &mut DeviceBuffer) -> DeviceBuffer;
    fn release_idle(&self);
    fn download(
        &self,
        buffer: &mut DeviceBuffer,
        range: Range<usize>,
    ) -> LocalBoxFuture<'static, Result<Bytes>>;
    fn reset_state(&self, state: &mut StateMut<'_, DeviceBuffer>) -> Result<()>;
    fn attend<'a>(
        &'a self,
        args: Attend<'a, DeviceBuffer>,
        control: &'a Control,
    ) -> LocalBoxFuture<'a, Result<()>>;
    fn attend_and_finalize<'a>(
        &'a self,
        args: Attend<'a, DeviceBuffer>,
        results: Results<'a, DeviceBuffer>,
        control: &'a Control,
    ) -> LocalBoxFuture<'a, Result<()>>;
    fn merge(&self, into: &mut StateMut<'_, DeviceBuffer>, from: &State<'_, DeviceBuffer>) -> Result<()>;
    fn finalize(
        &self,
        state: &State<'_, DeviceBuffer>,
        sinks: &[f32],
        dtype: Dtype,
        output: [&mut DeviceBuffer; 2],
    ) -> Result<()>;
    fn repack(
        &self,
        from: (&DeviceBuffer, Layout),
        into: (&mut DeviceBuffer, Layout),
        extent: Extent,
    ) -> Result<()>;
    fn convert(
        &self,
        from: Elements<&DeviceBuffer>,
        into: Elements<&mut DeviceBuffer>,
        shape: [usize; 4],
        overflow: Option<&mut DeviceBuffer>,
    ) -> Result<()>;
    fn supports_backward(&self, dtype: Dtype, head_dim: usize) -> Result<()>;
    fn supports_bias_gradient(&self) -> Result<()>;
    fn supports_fixed_order(&self) -> Result<()>;
    fn accuracy(&self, dtype: Dtype) -> Accuracy;
    fn backward_tile_shape(&self, problem: &AttentionProblem, shape: StateShape) -> TileShape;
    fn row_stats(&self, args: RowStats<'_, DeviceBuffer>) -> Result<()>;
    fn attend_backward<'a>(
        &'a self,
        args: AttendBackward<'a, DeviceBuffer>,
        control: &'a Control,
    ) -> LocalBoxFuture<'a, Result<()>>;
    fn accumulate(
        &self,
        from: (&DeviceBuffer, Layout),
        into: (&mut DeviceBuffer, Layout),
        extent: Extent,
    ) -> Result<()>;
    fn clear(&self, buffer: &mut DeviceBuffer) -> Result<()>;
    fn wait(&self) -> LocalBoxFuture<'_, Result<()>>;
    fn expect_short_work(&self, on: bool);
    fn measure_kernels(&self, on: bool);
    fn kernel_times(&self) -> Result<Vec<KernelTime>>;
}

impl<B: Backend + Threaded + 'static> AnyBackend for B
where
    B::Buffer: Threaded + 'static,
{
    fn info(&self) -> &DeviceInfo {
        Backend::info(self)
    }

    fn supports(&self, dtype: Dtype, head_dim: usize) -> Result<()> {
        Backend::supports(self, dtype, head_dim)
    }

    fn most_state_bytes(&self) -> Option<u64> {
        Backend::most_state_bytes(self)
    }

    fn kernel(&self, dtype: Dtype, shape: StateShape) -> String {
        Backend::kernel(self, dtype, shape)
    }

    fn tile_shape(&self, problem: &AttentionProblem, shape: StateShape) -> TileShape {
        Backend::tile_shape(self, problem, shape)
    }

    fn alloc(&self, label: &str, bytes: usize) -> Result<DeviceBuffer> {
        Backend::alloc(self, label, bytes).map(DeviceBuffer::new)
    }

    fn upload(&self, label: &str, data: Bytes) -> Result<DeviceBuffer> {
        Backend::upload(self, label, data).map(DeviceBuffer::new)
    }

    fn write(&self, buffer: &mut DeviceBuffer, offset: usize, data: &[u8]) -> Result<()> {
        Backend::write(self, buffer.of_mut::<B>(), offset, data)
    }

    fn share(&self, buffer: &mut DeviceBuffer) -> DeviceBuffer {
        DeviceBuffer::new(Backend::share(self, buffer.of_mut::<B>()))
    }

    fn release_idle(&self) {
        Backend::release_idle(self);
    }

    fn download(
        &self,
        buffer: &mut DeviceBuffer,
        range: Range<usize>,
    ) -> LocalBoxFuture<'static, Result<Bytes>> {
        Box::pin(Backend::download(self, buffer.of_mut::<B>(), range))
    }

    fn reset_state(&self, state: &mut StateMut<'_, DeviceBuffer>) -> Result<()> {
        Backend::reset_state(self, &mut state_mut::<B>(state))
    }

    fn attend<'a>(
        &'a self,
        args: Attend<'a, DeviceBuffer>,
        control: &'a Control,
    ) -> LocalBoxFuture<'a, Result<()>> {
        Box::pin(Backend::attend(self, attend_of::<B>(args), control))
    }

    fn attend_and_finalize<'a>(
        &'a self,
        args: Attend<'a, DeviceBuffer>,
        results: Results<'a, DeviceBuffer>,
        control: &'a Control,
    ) -> LocalBoxFuture<'a, Result<()>> {
        let Results { sinks, o, lse } = results;
        let results = Results { sinks, o: o.of_mut::<B>(), lse: lse.of_mut::<B>() };
        Box::pin(Backend::attend_and_finalize(self, attend_of::<B>(args), results, control))
    }

    fn merge(&self, into: &mut StateMut<'_, DeviceBuffer>, from: &State<'_, DeviceBuffer>) -> Result<()> {
        Backend::merge(self, &mut state_mut::<B>(into), &state_ref::<B>(from))
    }

    fn finalize(
        &self,
        state: &State<'_, DeviceBuffer>,
        sinks: &[f32],
        dtype: Dtype,
        [o, lse]: [&mut DeviceBuffer; 2],
    ) -> Result<()> {
        Backend::finalize(self, &state_ref::<B>(state), sinks, dtype, o.of_mut::<B>(), lse.of_mut::<B>())
    }

    fn repack(
        &self,
        from: (&DeviceBuffer, Layout),
        into: (&mut DeviceBuffer, Layout),
        extent: Extent,
    ) -> Result<()> {
        Backend::repack(self, (from.0.of::<B>(), from.1), (into.0.of_mut::<B>(), into.1), extent)
    }

    fn convert(
        &self,
        from: Elements<&DeviceBuffer>,
        into: Elements<&mut DeviceBuffer>,
        shape: [usize; 4],
        overflow: Option<&mut DeviceBuffer>,
    ) -> Result<()> {
        let (from, into) = (from.map(DeviceBuffer::of::<B>), into.map(DeviceBuffer::of_mut::<B>));
        Backend::convert(self, from, into, shape, overflow.map(DeviceBuffer::of_mut::<B>))
    }

    fn supports_backward(&self, dtype: Dtype, head_dim: usize) -> Result<()> {
        Backend::supports_backward(self, dtype, head_dim)
    }

    fn supports_bias_gradient(&self) -> Result<()> {
        Backend::supports_bias_gradient(self)
    }

    fn supports_fixed_order(&self) -> Result<()> {
        Backend::supports_fixed_order(self)
    }

    fn accuracy(&self, dtype: Dtype) -> Accuracy {
        Backend::accuracy(self, dtype)
    }

    fn backward_tile_shape(&self, problem: &AttentionProblem, shape: StateShape) -> TileShape {
        Backend::backward_tile_shape(self, problem, shape)
    }

    fn row_stats(&self, args: RowStats<'_, DeviceBuffer>) -> Result<()> {
        let RowStats { dtype, shape, o, d_o, lse, d_lse, stats } = args;
        let args = RowStats {
            dtype,
            shape,
            o: o.of::<B>(),
            d_o: d_o.of::<B>(),
            lse: lse.of::<B>(),
            d_lse: d_lse.map(DeviceBuffer::of::<B>),
            stats: stats.of_mut::<B>(),
        };
        Backend::row_stats(self, args)
    }

    fn attend_backward<'a>(
        &'a self,
        args: AttendBackward<'a, DeviceBuffer>,
        control: &'a Control,
    ) -> LocalBoxFuture<'a, Result<()>> {
        let args = AttendBackward {
            dtype: args.dtype,
            scale: args.scale,
            softcap: args.softcap,
            q: operand::<B>(args.q),
            d_o: operand::<B>(args.d_o),
            stats: operand::<B>(args.stats),
            k: operand::<B>(args.k),
            v: operand::<B>(args.v),
            kv_head_of: args.kv_head_of,
            work: args.work,
            bias: args.bias.map(bias::<B>),
            shape: args.shape,
            dq: args.dq.of_mut::<B>(),
            dk: args.dk.of_mut::<B>(),
            dv: args.dv.of_mut::<B>(),
            kv_layout: args.kv_layout,
            d_bias: args.d_bias.map(|BiasGradient { buffer, layout, columns }| BiasGradient {
                buffer: buffer.of_mut::<B>(),
                layout,
                columns,
            }),
        };
        Box::pin(Backend::attend_backward(self, args, control))
    }

    fn accumulate(
        &self,
        from: (&DeviceBuffer, Layout),
        into: (&mut DeviceBuffer, Layout),
        extent: Extent,
    ) -> Result<()> {
        Backend::accumulate(self, (from.0.of::<B>(), from.1), (into.0.of_mut::<B>(), into.1), extent)
    }

    fn clear(&self, buffer: &mut DeviceBuffer) -> Result<()> {
        Backend::clear(self, buffer.of_mut::<B>())
    }

    fn wait(&self) -> LocalBoxFuture<'_, Result<()>> {
        Box::pin(Backend::wait(self))
    }

    fn expect_short_work(&self, on: bool) {
        Backend::expect_short_work(self, on);
    }

    fn measure_kernels(&self, on: bool) {
        Backend::measure_kernels(self, on);
    }

    fn kernel_times(&self) -> Result<Vec<KernelTime>> {
        Backend::kernel_times(self)
    }
}

fn attend_of<'a, B: Backend>(args: Attend<'a, DeviceBuffer>) -> Attend<'a, B::Buffer>
where
    B::Buffer: Threaded + 'static,
{
    let StateMut { a, ml, shape } = args.state;
    Attend {
        dtype: args.dtype,
        scale: args.scale,
        softcap: args.softcap,
        q: operand::<B>(args.q),
        k: operand::<B>(args.k),
        v: operand::<B>(args.v),
        kv_head_of: args.kv_head_of,
        work: args.work,
        bias: args.bias.map(bias::<B>),
        fixed_order: args.fixed_order,
        inference: args.inference,
        state: StateMut { a: a.of_mut::<B>(), ml: ml.of_mut::<B>(), shape },
    }
}

fn operand<'a, B: Backend<Buffer: 'static>>(
    Operand { buffer, layout }: Operand<'a, DeviceBuffer>,
) -> Operand<'a, B::Buffer> {
    Operand { buffer: buffer.of::<B>(), layout }
}

fn bias<'a, B: Backend<Buffer: 'static>>(
    BiasInput { kind, buffer, layout }: BiasInput<'a, DeviceBuffer>,
) -> BiasInput<'a, B::Buffer> {
    BiasInput { kind, buffer: buffer.of::<B>(), layout }
}

fn state_mut<'a, B: Backend<Buffer: 'static>>(
    state: &'a mut StateMut<'_, DeviceBuffer>,
) -> StateMut<'a, B::Buffer> {
    StateMut { a: state.a.of_mut::<B>(), ml: state.ml.of_mut::<B>(), shape: state.shape }
}

fn state_ref<'a, B: Backend<Buffer: 'static>>(state: &State<'a, DeviceBuffer>) -> State<'a, B::Buffer> {
    State { a: state.a.of::<B>(), ml: state.ml.of::<B>(), shape: state.shape }
}
