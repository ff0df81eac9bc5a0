// Package nodeview knows what the node offers now, what claims may use, and why not more.
//
// A [View] is computed once for each change of what it is made of: the inventory, the readiness
// conditions, the claims of NVIDIA's DRA driver, the unhealthy GPUs that no scan finds any more,
// the GPUs that only virtual machines can use, and those that a process keeps from them. A View
// never changes. [Node.View] reads the newest one without a lock, and [View.Changed] tells when
// there is a newer one.
//
// A scan and a condition are in the View before the call that reports them returns. Node.Run
// follows the health of the GPUs within milliseconds. A Prepare reads the View once.
//
// Time alone makes no new View. A [Condition] has the time since when it lasts, and readers pass
// their own time to [ShownCondition]. Some inputs change without a signal: the notes about ended
// claims of NVIDIA's DRA driver, and the grace after the recovery of a GPU. Run looks at them every
// few seconds.
//
// The package publishes nothing and changes no hardware.
package nodeview
