// Package health judges each device from what the hardware reports, and knows when a fault is over.
//
// A [Monitor] receives [device.Signal] values and the time. For each card it keeps findings: what
// was seen, on which part of the card, since when, and what ends it. A [Verdict] summarizes the
// findings of one device, a whole GPU or a partition. The gravest finding decides the state of the
// verdict. Milder findings are listed in the verdict, too.
//
// What ends a finding depends on its kind:
//
//   - A level ends when the hardware is queried again and no longer reports it. Levels are lost,
//     unknown, a recovery action, a pending row remap and a missing fabric. An answer that does not
//     mention a level does not end it.
//   - A latched finding, such as an XID that requires a GPU reset, ends only with a reset, never by
//     time. Proof of a reset: the recovery action went back to none, counters that only grow
//     restarted, a pending remap took effect, a lost card is back, the driver was loaded again, or
//     the node booted.
//   - A passing finding, such as an application's error, ends when it has not recurred for a while.
//
// A table says what each XID means. An admin can override the meaning of each code. If the driver
// reports a recovery action, that action takes precedence.
//
// The package queries no hardware, and its caller supplies the time. A [Store] keeps the findings
// on disk, so a restart of the plugin changes neither a verdict nor its start time. A reboot drops
// the findings. The memory that a [Monitor] uses is bounded.
//
// The package does not act on verdicts. Its callers set taints, and write reports, metrics and
// Events.
package health
