package reconciler

import (
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"
)

// discrepancies has the differences between checkpoint records and hardware that were logged last,
// so that each is logged once.
type discrepancies struct {
	// reported has the lines of the last error. They are sorted, because each comparison may return
	// them in another order.
	reported []string
	pause    time.Duration
}

// next logs the error err of a comparison if it has new lines, and returns the pause until the next
// one: interval without an error, retryPause if this comparison was requested or the
// number of lines changed, else twice the last pause, because most lasting errors need an operator.
func (d *discrepancies) next(logger klog.Logger, err error, requested bool) time.Duration {
	var now []string
	if err != nil {
		now = slices.Sorted(strings.SplitSeq(err.Error(), "\n"))
	}
	before := d.reported
	d.reported = now
	switch {
	case err == nil:
		d.pause = interval
	case requested, len(now) != len(before):
		d.pause = retryPause
	default:
		d.pause = min(2*d.pause, interval)
	}
	news := slices.ContainsFunc(now, func(line string) bool { return !slices.Contains(before, line) })
	switch {
	case news:
		logger.Error(err, "Checkpoint records and hardware differ; retrying")
	case err != nil:
		logger.V(2).Info("Checkpoint records and hardware still differ; retrying", "err", err, "after", d.pause)
	case len(before) > 0:
		logger.Info("Checkpoint records and hardware agree again")
	}
	return d.pause
}
