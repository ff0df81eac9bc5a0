// Package health turns what the hardware says into one verdict per device, and knows when it is over.
//
// A [Monitor] is fed [device.Signal] values and the time. For each card it keeps findings: what was seen, on which part of the card, since when, and
// what ends it. A [Verdict] is what the findings say of one device, whole or partition; the gravest says how it is, and milder ones stay beside it.
//
// What ends a finding depends on what it is:
//
//   - A level (lost, unknown, a recovery action, a pending row remap, a fabric that is not there) ends when the hardware is asked again and says so. What
//     the hardware does not know ends nothing.
//   - A latched one (an XID after which the GPU has to be reset) ends when a reset was seen: the recovery action went from something to none, counters
//     that only grow began anew, a pending remap has taken effect, a lost card is back, the driver was loaded again, the node has booted. Never by time.
//   - A passing one (an application's error, a piece of information) ends when it has not come again for a while.
//
// What an XID means is a table; an admin can say otherwise for each code. Where the driver recommends a recovery action, that goes first.
//
// The package is pure: time is given to it, and it asks no hardware. A [Store] keeps the findings on the disk, so that a restart of the plugin changes
// neither a verdict nor the time since when it holds; a reboot drops them. Memory is bounded whatever comes.
//
// It does not say what is done about a verdict: taints, reports, metrics and Events are made of it elsewhere.
package health
