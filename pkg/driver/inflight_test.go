package driver

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

func TestDrainWaitsForCallsUnderWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		calls := newInflight()
		if err := calls.Wait(t.Context()); err != nil {
			t.Fatalf("idle from the start: %v", err)
		}
		finish := make(chan struct{})
		for range 2 {
			go func() {
				_, _ = calls.intercept(t.Context(), nil, nil, func(context.Context, any) (any, error) { <-finish; return nil, nil })
			}()
		}
		synctest.Wait()
		short, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := calls.Wait(short); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("with two calls under way: %v", err)
		}
		close(finish)
		synctest.Wait()
		if err := calls.Wait(t.Context()); err != nil {
			t.Fatalf("after both: %v", err)
		}
	})
}
