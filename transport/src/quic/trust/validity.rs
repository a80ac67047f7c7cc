//! The validity of a certificate, and dates as text.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use x509_parser::prelude::ASN1Time;

/// From when until when a certificate is valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validity {
    /// Not before this time.
    pub from: SystemTime,
    /// Not after this time.
    pub until: SystemTime,
}

impl Validity {
    /// From now on, for a number of days.
    pub fn days(days: u32) -> Self {
        let now = SystemTime::now();
        // Clocks of a cluster differ; an hour of grace keeps a fast one from refusing.
        Self { from: now - Duration::from_secs(3600), until: now + DAY * days }
    }

    pub(crate) fn of_asn1(validity: &x509_parser::certificate::Validity) -> Self {
        Self { from: system_time(&validity.not_before), until: system_time(&validity.not_after) }
    }

    /// What is wrong at `now`, such as `expired on 2026-11-20 18:00 UTC`; `None` while it holds.
    pub fn complaint(&self, now: SystemTime) -> Option<String> {
        let now_is = |what: String| format!("{what} (the clock here says {})", Date(now));
        if now > self.until {
            return Some(now_is(format!("expired on {}", Date(self.until))));
        }
        (now < self.from).then(|| now_is(format!("is not valid before {}", Date(self.from))))
    }

    /// Whole days that are left; 0 once it has expired.
    pub fn days_left(&self, now: SystemTime) -> u64 {
        self.until.duration_since(now).map_or(0, |left| left.as_secs() / DAY.as_secs())
    }
}

fn system_time(time: &ASN1Time) -> SystemTime {
    let seconds = time.timestamp();
    let distance = Duration::from_secs(seconds.unsigned_abs());
    if seconds < 0 { UNIX_EPOCH - distance } else { UNIX_EPOCH + distance }
}

/// A time as `2026-11-20 18:00 UTC`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Date(pub SystemTime);

impl fmt::Display for Date {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = match self.0.duration_since(UNIX_EPOCH) {
            Ok(after) => i64::try_from(after.as_secs()).unwrap_or(i64::MAX),
            Err(before) => i64::try_from(before.duration().as_secs()).map_or(i64::MIN, |seconds| -seconds),
        };
        match ASN1Time::from_timestamp(seconds) {
            Ok(time) => {
                let time = time.to_datetime();
                write!(f, "{} {:02}:{:02} UTC", time.date(), time.hour(), time.minute())
            }
            Err(_) => write!(f, "{seconds} s after 1970"),
        }
    }
}

/// What to do about something that is not valid yet.
pub(crate) const SET_THE_CLOCK: &str = "set the clock of this host, or that of the host that issued it, and keep them right \
                                        by NTP";

const DAY: Duration = Duration::from_secs(24 * 3600);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_date_is_said_as_people_write_it() {
        let at = |seconds| Date(UNIX_EPOCH + Duration::from_secs(seconds)).to_string();
        assert_eq!(at(0), "1970-01-01 00:00 UTC");
        assert_eq!(at(951_782_400 + 3_661), "2000-02-29 01:01 UTC");
        assert_eq!(Date(UNIX_EPOCH - Duration::from_secs(60)).to_string(), "1969-12-31 23:59 UTC");
    }

    #[test]
    fn a_certificate_holds_from_its_first_second_to_its_last() {
        let (from, until) =
            (UNIX_EPOCH + Duration::from_secs(1_000_000), UNIX_EPOCH + Duration::from_secs(2_000_000));
        let validity = Validity { from, until };
        assert_eq!(validity.complaint(from), None);
        assert_eq!(validity.complaint(until), None);
        let second = Duration::from_secs(1);
        let early = validity.complaint(from - second).unwrap();
        assert!(early.contains("not valid before 1970-01-12 13:46 UTC"), "{early}");
        let late = validity.complaint(until + second).unwrap();
        assert!(late.contains("expired on 1970-01-24 03:33 UTC"), "{late}");
        assert_eq!((validity.days_left(from), validity.days_left(until + second)), (11, 0));
    }
}
