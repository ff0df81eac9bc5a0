package nodeview

import "context"

// Check finds out whether the host can run containers with this driver's devices. A new one needs
// a type that implements it, a place in the driver's list, and a code in docs/operations.md.
type Check interface {
	// Source names the check in its condition.
	Source() string
	// Look returns the condition, or nil if there is none. If known is false, the last answer stays.
	Look(ctx context.Context) (c *Condition, known bool)
}

// Check lets the checks look, one after another, and reports or clears their conditions.
func (c *Conditions) Check(ctx context.Context, checks []Check) {
	for _, check := range checks {
		switch now, known := check.Look(ctx); {
		case !known:
		case now == nil:
			c.Clear(check.Source())
		default:
			now.Source = check.Source()
			c.Report(*now)
		}
	}
}
