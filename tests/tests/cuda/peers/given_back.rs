//! What a device gives back while nobody asks it for anything: its context, and memory that it does
//! not keep.

use std::time::{Duration, Instant};

use kyklos::backend::Backend;
use kyklos_cuda::CudaOptions;
use pollster::block_on;

use super::apart::{BYTES, Pair, is_message, message, that_ends, works, write};
use super::scenario;
use crate::caller::driver::Context;
use crate::scenario::{HANGS_AFTER, Scenario};

pub(super) fn scenarios() -> Vec<Scenario> {
    let one = |name: &str, fake: &str, run: fn()| {
        let mut one = scenario(name, 2, move || that_ends(run));
        one.fake = format!("devices=2,delay_us=0,{fake}");
        one
    };
    vec![
        one(
            "a device is closed while the memory that it has copied from is still held",
            "memory_mb=256",
            closed,
        ),
        one("memory of a message that is too much to keep is given back", "memory_mb=64", message_given_back),
        one(
            "memory under copy that is too much to keep is given back",
            "memory_mb=64,copy_ms=300",
            message_given_back,
        ),
        one(
            "memory in use that is too much to keep is given back",
            "memory_mb=64,copy_ms=300",
            used_given_back,
        ),
    ]
}

fn soon(what: &str, is_so: impl Fn() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < HANGS_AFTER, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The sender still has the memory, as it has that of a cache, and does nothing with it.
fn closed() {
    let pair = Pair::new(&CudaOptions::default());
    let sender = pair.devices[1].clone();
    let mut held = sender.upload("message", message()).unwrap();
    let received = pair.send(1, sender.share(&mut held));
    is_message(&pair.devices[0], received);
    drop(pair);
    soon("the receiver's context is released", || !Context::is_retained(0));
    is_message(&sender, held);
    works(&sender);
}

/// Nobody has the memory any more, and no other is asked for.
fn message_given_back() {
    let pair = Pair::new(&CudaOptions::default());
    let context = Context::primary(1);
    let sent = pair.devices[1].upload("message", message()).unwrap();
    let received = pair.send(1, sent);
    is_message(&pair.devices[0], received);
    soon("the sender's memory is freed", || context.used_bytes() < BYTES);
    works(&pair.devices[1]);
}

/// The device still writes the memory when its rank drops it.
fn used_given_back() {
    let pair = Pair::new(&CudaOptions::default());
    let [receiver, sender] = &pair.devices;
    let context = Context::primary(0);
    let mut received = pair.send(1, sender.upload("message", message()).unwrap());
    write(receiver, &mut received).unwrap();
    drop(received);
    block_on(receiver.wait()).unwrap();
    soon("the receiver's memory is freed", || context.used_bytes() < BYTES);
    works(receiver);
}
