package nvmlx

import (
	"sync"
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

// Cards that hang reach their limit together. The end of one wait must not prolong the others.
func TestHangingCardsTimeOutTogether(t *testing.T) {
	for range 200 {
		synctest.Test(t, func(t *testing.T) {
			const cards = 4
			began, over, opens := time.Now(), make(chan struct{}), NewPendingOpens()
			var waits sync.WaitGroup
			var waiting []func()
			for range cards {
				waiting = append(waiting, opens.Add())
			}
			for _, done := range waiting {
				waits.Go(func() {
					defer done()
					_, err := BoundedWhile(t.Context(), time.Second, nil, opens, "a card", func() (any, error) { <-over; return nil, nil })
					if err == nil {
						t.Error("no timeout")
					}
				})
			}
			waits.Wait()
			close(over)
			if took := time.Since(began); took != cards*time.Second {
				t.Errorf("it took %s", took)
			}
		})
	}
}
