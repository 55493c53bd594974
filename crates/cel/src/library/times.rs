//! Parts of times and durations. Without a zone, times are read in UTC.

use super::Native;
use crate::error::EvalError;
use crate::time::Civil;
use crate::value::{Eval, Value};

pub(super) fn native(name: &str) -> Option<Native> {
    Some(match name {
        "getFullYear" => |_, args| part(args, |at| at.year, None),
        "getMonth" => |_, args| part(args, |at| at.month - 1, None),
        "getDayOfYear" => |_, args| part(args, |at| at.day_of_year, None),
        "getDayOfMonth" => |_, args| part(args, |at| at.day - 1, None),
        "getDate" => |_, args| part(args, |at| at.day, None),
        "getDayOfWeek" => |_, args| part(args, |at| at.weekday, None),
        "getHours" => |_, args| part(args, |at| at.hour, Some(|nanos| nanos / 3_600_000_000_000)),
        "getMinutes" => |_, args| part(args, |at| at.minute, Some(|nanos| nanos / 60_000_000_000)),
        "getSeconds" => |_, args| part(args, |at| at.second, Some(|nanos| nanos / 1_000_000_000)),
        "getMilliseconds" => |_, args| {
            part(
                args,
                |at| i64::from(at.nanos) / 1_000_000,
                Some(|nanos| nanos / 1_000_000),
            )
        },
        _ => return None,
    })
}

fn part<'a>(args: &[Value<'a>], of: fn(Civil) -> i64, whole: Option<fn(i64) -> i64>) -> Eval<Value<'a>> {
    let value = match (args, whole) {
        ([Value::Timestamp(at)], _) => of(at.civil(None)?),
        ([Value::Timestamp(at), Value::String(zone)], _) => of(at.civil(Some(zone))?),
        ([Value::Duration(nanos)], Some(whole)) => whole(*nanos),
        _ => return Err(EvalError::no_such_overload()),
    };
    Ok(Value::Int(value))
}
