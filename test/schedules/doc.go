// Package schedules tests the plugin's transaction by deterministic simulation: Prepare, Unprepare,
// reconciliation and garbage collection run on a simulated node, and faults interrupt them at every
// call that they make.
//
// A schedule is the life of one node, derived from a seed. Claims are allocated, prepared and
// unprepared. The kubelet's calls get lost, repeated and canceled. Up to two instances of the
// plugin run at a time and are killed. The node loses power, disks fill up and fail, GPUs fall off
// the bus and are reset. The same seed always gives the same schedule.
//
// # What is real and what is simulated
//
// Real: packages prepare, checkpoint, durable, cdi and lock, and the file locks and the CDI
// directory in the kernel. For the changes of MIG policies also package publish and the scheduler's
// allocator.
//
// Simulated: the disk of the plugin's state with its page cache (package durabletest), the GPUs
// (node.go), the MPS supervisor, the API server, the kubelet and the scheduler (claims.go,
// calls.go, actions.go), and time (testing/synctest), so that no test waits.
//
// # How a schedule runs
//
// Every call of the plugin to something simulated has a fault point, such as "record: rename"
// (faultpoints.go). The call blocks there until the schedule resumes it, alone or with a fault
// (blockedcalls.go). So the schedule decides which of the concurrent calls goes on, and any fault
// can interrupt any call. Between the calls the schedule makes events happen that come from outside
// the plugin (actions.go).
//
// The coverage table counts how often each fault met each fault point. Each seed has a bias towards
// one cell of that table (bias.go), so that rare cells are met too.
//
// The tests are:
//   - TestInvariantsHoldUnderFaults runs random schedules.
//   - TestExploreSmallWorlds uses no random numbers. On a node with two claims it tries every
//     operation, with each fault at each fault point, and every pair of operations (explore.go).
//   - TestPolicyChangesKeepAllocations changes MIG policies under allocated claims, without faults
//     (policies.go).
//   - TestSeedIsReproducible runs seeds twice and compares the traces.
//
// # Invariants
//
// A schedule checks them with each answer to the kubelet, whenever no call is in flight, and at the
// end, when all faults are over and every claim is unprepared (invariants.go, finish.go):
//
//  1. No device belongs to two claims. No two devices of prepared claims exclude each other, and
//     the claims of a device hold no more memory than it has. After a load of the NVIDIA driver and
//     a reconciliation, no CDI spec names another GPU's device node.
//  2. No success without durable state. What a successful Prepare promises exists, and survives a
//     power cut: record, specs, partition, settings, daemon. After a successful Unprepare no file
//     names the claim, and each holder file has a claim, except of a time slice.
//  3. A success stays true. A prepared claim keeps its record. It keeps its spec, except after an
//     event whose damage only reconciliation repairs.
//  4. Nothing changes that belongs to an admin. The plugin destroys no MIG instance of an admin,
//     and restores the settings that an admin had made.
//  5. No leak. After all faults, when every claim is unprepared, there are no records, specs,
//     holder files (the state of settings that claims share), MIG instances, daemons or locks.
//  6. Every claim can be unprepared, on a full disk too, and every device can be prepared again.
//
// After a change of MIG policies two more hold (policyinvariants.go): no GPU is over-committed, and
// every allocated claim can be prepared.
//
// # Replay a seed
//
// A failed test prints the violated invariants, the trace and the flags that run it again:
//
//	go test ./test/schedules -run TestInvariantsHoldUnderFaults -args -seed=4711 -schedules=1
//	go test ./test/schedules -run TestPolicyChangesKeepAllocations -args -seed=4711 -policies=1
//
// In the trace, the line "plugin 2:   record: create: power cut within" means that process 2 of the
// plugin reached this fault point and met this fault. Once the plugin makes other calls, the seed
// gives another schedule, so keep the trace.
//
// # Add a fault point or a fault
//
// A fault point: call [process.do] with its name before the effect of the new call, and list the
// name with its class in classes (faultpoints.go). The class says which faults are possible. If
// schedules reach it rarely, add it to odds, biases or rarest. `make test-faults-long` fails until
// each of its cells was met 20 times.
//
// A fault: add it with its classes to faults (faultpoints.go), and its effect to [process.do] if it
// changes the call itself, or to [schedule.inject] if it changes the node.
//
// # Mutants
//
// An invariant proves nothing if it cannot fail. Package mutants puts one defect at a time into the
// plugin's code and runs the schedules, which must report a violation. `make test-mutants` runs all
// of them (mutants/table.go). A new guarantee gets a mutant that breaks it.
package schedules
