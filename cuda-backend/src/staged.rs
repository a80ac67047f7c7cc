//! The messages of an exchange that go through host memory, beside those that go from device to
//! device.

use std::pin::Pin;

use kyklos::Meter;
use kyklos::backend::{Device, DeviceBuffer};
use kyklos::collective::{Collective, ExchangeError, HostStaged, Incoming, Memory, Outgoing};
use kyklos_transport::Tag;

/// Ends with the pieces of a message that arrives.
pub(crate) type Arrival<'a> = Pin<Box<dyn Future<Output = Result<Vec<DeviceBuffer>, ExchangeError>> + 'a>>;

/// Ends when messages have been sent.
pub(crate) type Departure<'a> = Pin<Box<dyn Future<Output = Result<(), ExchangeError>> + 'a>>;

/// Posts the receive of one message.
pub(crate) fn receive<'a>(
    host: &'a HostStaged,
    device: &'a Device,
    meter: &'a Meter,
    tag: Tag,
    recv: &Incoming,
) -> Arrival<'a> {
    let recvs = std::slice::from_ref(recv);
    let staged = host.post_exchange(device, meter, tag, &mut Memory::default(), &[], recvs);
    Box::pin(async move { Ok(staged.await?.into_iter().flatten().collect()) })
}

/// Posts messages. `None`: there are none.
pub(crate) fn send<'a>(
    host: &'a HostStaged,
    device: &'a Device,
    meter: &'a Meter,
    tag: Tag,
    memory: &mut Memory<DeviceBuffer>,
    sends: &[Outgoing],
) -> Option<Departure<'a>> {
    if sends.is_empty() {
        return None;
    }
    let staged = host.post_exchange(device, meter, tag, memory, sends, &[]);
    Some(Box::pin(async move { staged.await.map(drop) }))
}
