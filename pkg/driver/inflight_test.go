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
	"k8s.io/apimachinery/pkg/types"
)

func TestDrainWaitsForRunningCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		calls := newInFlightCalls()
		prepare := &grpc.UnaryServerInfo{FullMethod: "/v1.DRAPlugin/NodePrepareResources"}
		unprepare := &grpc.UnaryServerInfo{FullMethod: "/v1.DRAPlugin/NodeUnprepareResources"}
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
			t.Fatalf("while two calls run: %v", err)
		}
		answer := func(context.Context, any) (any, error) { return "answer", nil }
		if _, err := calls.intercept(t.Context(), nil, prepare, answer); status.Code(err) != codes.Unavailable {
			t.Errorf("a Prepare was admitted while draining: %v", err)
		}
		if _, err := calls.intercept(t.Context(), nil, unprepare, answer); err != nil {
			t.Errorf("an Unprepare was refused while draining: %v", err)
		}
		close(finish)
		synctest.Wait()
		if err := calls.Drain(t.Context()); err != nil {
			t.Fatalf("after both calls: %v", err)
		}
	})
}

func TestOnlyEarlierCallsLearnOfAnUnprepare(t *testing.T) {
	calls := newInFlightCalls()
	prepare := &grpc.UnaryServerInfo{FullMethod: "/v1.DRAPlugin/NodePrepareResources"}
	_, err := calls.intercept(t.Context(), nil, prepare, func(early context.Context, _ any) (any, error) {
		calls.Unprepared("a")
		return calls.intercept(t.Context(), nil, prepare, func(late context.Context, _ any) (any, error) {
			for _, c := range []struct {
				ctx  context.Context
				uid  types.UID
				want bool
			}{{early, "a", true}, {early, "b", false}, {late, "a", false}, {t.Context(), "a", false}} {
				if got := calls.UnpreparedSince(c.ctx, c.uid); got != c.want {
					t.Errorf("claim %s: %v", c.uid, got)
				}
			}
			return nil, nil
		})
	})
	if err != nil || len(calls.running) != 0 {
		t.Errorf("%v, and %d finished calls are still tracked", err, len(calls.running))
	}
}
