package nvmlx

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestBoundedEndsWithContextOrLimit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		forever := make(chan struct{})
		defer close(forever)
		_, err := Bounded(t.Context(), CallLimit, "nvmlX", func() (int, error) { <-forever; return 0, nil })
		if err == nil || err.Error() != "nvmlX has not answered for 10s" {
			t.Error(err)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		v, err := Bounded(t.Context(), CallLimit, "nvmlX", func() (int, error) { return 7, nil })
		if v != 7 || err != nil {
			t.Error(v, err)
		}
	})
}

func TestSlowGPUIsNotTakenForHung(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		progress := make(chan struct{}, 1)
		v, err := BoundedWhile(t.Context(), CallLimit, progress, NewPendingOpens(), "nvmlX", func() (int, error) {
			for range 10 {
				<-time.After(CallLimit - time.Second)
				progress <- struct{}{}
			}
			return 7, nil
		})
		if v != 7 || err != nil {
			t.Error(v, err)
		}
	})
}
