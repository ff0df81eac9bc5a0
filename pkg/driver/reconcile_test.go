package driver

import (
	"errors"
	"strings"
	"testing"
	"time"

	"k8s.io/klog/v2/ktesting"
)

func TestWhatDoesNotGetBetterIsComparedAtTheRegularPace(t *testing.T) {
	logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true), ktesting.Verbosity(0)))
	sink, ok := logger.GetSink().(ktesting.Underlier)
	if !ok {
		t.Fatal("the log cannot be read")
	}
	said := 0
	// says is whether something was logged since the last call.
	says := func() bool {
		before := said
		said = strings.Count(sink.GetBuffer().String(), "\n")
		return said > before
	}
	lost, foreign := errors.New("claim a: the card was replaced"), errors.New("claim b: steps of another version")
	var left disagreement
	for i, round := range []struct {
		err   error
		asked bool
		after time.Duration
		says  bool
	}{
		{nil, true, 30 * time.Second, false},
		{lost, false, 5 * time.Second, true},
		{lost, false, 10 * time.Second, false},
		{lost, false, 20 * time.Second, false},
		{lost, false, 30 * time.Second, false},
		{lost, false, 30 * time.Second, false},
		{lost, true, 5 * time.Second, false}, // asked to compare: something has changed
		{lost, false, 10 * time.Second, false},
		{errors.Join(lost, foreign), false, 5 * time.Second, true},
		{errors.Join(foreign, lost), false, 10 * time.Second, false}, // in another order
		{errors.Join(foreign, lost), false, 20 * time.Second, false},
		{foreign, false, 5 * time.Second, false}, // it gets better
		{foreign, false, 10 * time.Second, false},
		{nil, false, 30 * time.Second, true},
		{nil, false, 30 * time.Second, false},
		{foreign, false, 5 * time.Second, true},
	} {
		if after, says := left.next(logger, round.err, round.asked), says(); after != round.after || says != round.says {
			t.Errorf("round %d (%v): again after %s, logged: %v", i, round.err, after, says)
		}
	}
}
