package wake

import "testing"

func TestWakesBeforeAReceiveCountOnce(t *testing.T) {
	s := New()
	for range 3 {
		s.Wake() // does not block
	}
	<-s
	select {
	case <-s:
		t.Error("woken twice")
	default:
	}
}
