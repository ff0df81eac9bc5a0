package reconciler

import (
	"errors"
	"strings"
	"testing"
	"time"

	"k8s.io/klog/v2/ktesting"
)

func TestLastingErrorsSlowReconciliationDown(t *testing.T) {
	logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true), ktesting.Verbosity(0)))
	sink, ok := logger.GetSink().(ktesting.Underlier)
	if !ok {
		t.Fatal("cannot read the log")
	}
	lines := 0
	// logged reports whether the logger got a line since the last call of logged.
	logged := func() bool {
		before := lines
		lines = strings.Count(sink.GetBuffer().String(), "\n")
		return lines > before
	}
	lost, foreign := errors.New("claim a: the card was replaced"), errors.New("claim b: steps of another version")
	var left discrepancies
	for i, round := range []struct {
		err       error
		requested bool
		after     time.Duration
		logged    bool
	}{
		{nil, true, 30 * time.Second, false},
		{lost, false, 5 * time.Second, true},
		{lost, false, 10 * time.Second, false},
		{lost, false, 20 * time.Second, false},
		{lost, false, 30 * time.Second, false},
		{lost, false, 30 * time.Second, false},
		{lost, true, 5 * time.Second, false}, // a requested comparison resets the pause
		{lost, false, 10 * time.Second, false},
		{errors.Join(lost, foreign), false, 5 * time.Second, true},
		{errors.Join(foreign, lost), false, 10 * time.Second, false}, // the same errors in another order
		{errors.Join(foreign, lost), false, 20 * time.Second, false},
		{foreign, false, 5 * time.Second, false}, // one error less
		{foreign, false, 10 * time.Second, false},
		{nil, false, 30 * time.Second, true},
		{nil, false, 30 * time.Second, false},
		{foreign, false, 5 * time.Second, true},
	} {
		if after, logged := left.next(logger, round.err, round.requested), logged(); after != round.after || logged != round.logged {
			t.Errorf("round %d (%v): next after %s, logged: %v", i, round.err, after, logged)
		}
	}
}
