package driver

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func TestDrainWaitsForCallsUnderWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		calls := newInflight()
		prepare, unprepare := &grpc.UnaryServerInfo{FullMethod: "/v1.DRAPlugin/NodePrepareResources"}, &grpc.UnaryServerInfo{FullMethod: "/v1.DRAPlugin/NodeUnprepareResources"}
		finish := make(chan struct{})
		for range 2 {
			go func() {
				_, _ = calls.intercept(t.Context(), nil, prepare, func(context.Context, any) (any, error) { <-finish; return nil, nil })
			}()
		}
		synctest.Wait()
		short, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := calls.Drain(short); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("with two calls under way: %v", err)
		}
		answer := func(context.Context, any) (any, error) { return "answer", nil }
		if _, err := calls.intercept(t.Context(), nil, prepare, answer); status.Code(err) != codes.Unavailable {
			t.Errorf("new work was begun while draining: %v", err)
		}
		if _, err := calls.intercept(t.Context(), nil, unprepare, answer); err != nil {
			t.Errorf("giving back is not new work: %v", err)
		}
		close(finish)
		synctest.Wait()
		if err := calls.Drain(t.Context()); err != nil {
			t.Fatalf("after both: %v", err)
		}
	})
}
