"""Members of the pool are kept off the caller's processor while they are woken, as text for LLVM.

Where the system wakes a thread, it likes to put it back where it was, or where the caller is, and
on a busy machine of few processors it looks no further.  On the caller's processor the two share it
for some milliseconds and the other is idle.  So a member is kept off it while it is woken, and one
who finds itself there moves; then it may run wherever it might before.
"""

from __future__ import annotations

from ltc import config
from ltc.support import processors

MASK_WORDS = 16  # of a set of processors: 1024 of them

# What the pool calls, word in its text -> instructions.
CALLS = {
    "KEEP_OFF": "%parted = call i1 @pool.keep.off(ptr %line, ptr %set)",
    "LET_BACK": "call void @pool.let.back(i1 %parted, ptr %line, ptr %set)",
    "MOVE_AWAY": "call void @pool.move.away(ptr %set)",
    "NOTE_MEMBER": "call void @pool.note.member(ptr %line)",
    "NOTE_CALLER": "call void @pool.note.caller()",
    "SET_OF_PROCESSORS": "%set = alloca [MASK_WORDS x i64], align 8",
}

# @pool.part(thread, processor, set): the thread, 0 being the caller's own, may no more run on that
# processor, for now; the set is then where it might run before.  False, and nothing has changed,
# where it has no other or there are fewer processors than members.
TEXT = """
@pool.processor = internal global i32 -1, align 4
declare i32 @gettid()
declare i32 @sched_getcpu()
declare i32 @sched_getaffinity(i32, i64, ptr)
declare i32 @sched_setaffinity(i32, i64, ptr)
declare i64 @llvm.ctpop.i64(i64)
declare i64 @llvm.smax.i64(i64, i64)
define internal i1 @pool.part(i32 %thread, i32 %processor, ptr %set) #0 {
start:
  call void @llvm.memset.p0.i64(ptr %set, i8 0, i64 MASK_BYTES, i1 false)
  %unknown = call i32 @sched_getaffinity(i32 %thread, i64 MASK_BYTES, ptr %set)
  %failed = icmp slt i32 %unknown, 0
  br i1 %failed, label %no, label %next
next:
  %i = phi i64 [ 0, %start ], [ %after, %next ]
  %count = phi i64 [ 0, %start ], [ %sum, %next ]
  %at = getelementptr i64, ptr %set, i64 %i
  %bits = load i64, ptr %at, align 8
  %ones = call i64 @llvm.ctpop.i64(i64 %bits)
  %sum = add i64 %count, %ones
  %after = add i64 %i, 1
  %more = icmp slt i64 %after, MASK_WORDS
  br i1 %more, label %next, label %counted
counted:
  %members = load atomic i64, ptr @pool.members monotonic, align 8
  %least = call i64 @llvm.smax.i64(i64 %members, i64 2)
  %few = icmp slt i64 %sum, %least
  br i1 %few, label %no, label %find
find:
  %number = zext i32 %processor to i64
  %word = udiv i64 %number, 64
  %known = icmp ult i64 %word, MASK_WORDS
  br i1 %known, label %look, label %no
look:
  %place = urem i64 %number, 64
  %bit = shl i64 1, %place
  %here = getelementptr i64, ptr %set, i64 %word
  %old = load i64, ptr %here, align 8
  %others = xor i64 %bit, -1
  %less = and i64 %old, %others
  store i64 %less, ptr %here, align 8
  %refused = call i32 @sched_setaffinity(i32 %thread, i64 MASK_BYTES, ptr %set)
  store i64 %old, ptr %here, align 8
  %done = icmp eq i32 %refused, 0
  ret i1 %done
no:
  ret i1 false
}

define internal i1 @pool.keep.off(ptr %line, ptr %set) #0 {
  %thread.at = getelementptr i64, ptr %line, i64 2
  %thread = load atomic i32, ptr %thread.at monotonic, align 8
  %callers = load atomic i32, ptr @pool.processor monotonic, align 4
  %parted = call i1 @pool.part(i32 %thread, i32 %callers, ptr %set)
  ret i1 %parted
}

define internal void @pool.let.back(i1 %parted, ptr %line, ptr %set) #0 {
start:
  br i1 %parted, label %free, label %end
free:
  %thread.at = getelementptr i64, ptr %line, i64 2
  %thread = load atomic i32, ptr %thread.at monotonic, align 8
  %freed = call i32 @sched_setaffinity(i32 %thread, i64 MASK_BYTES, ptr %set)
  br label %end
end:
  ret void
}

define internal void @pool.move.away(ptr %set) #0 {
start:
  %here = call i32 @sched_getcpu()
  %callers = load atomic i32, ptr @pool.processor monotonic, align 4
  %together = icmp eq i32 %here, %callers
  br i1 %together, label %move, label %end
move:
  %parted = call i1 @pool.part(i32 0, i32 %here, ptr %set)
  br i1 %parted, label %free, label %end
free:
  %freed = call i32 @sched_setaffinity(i32 0, i64 MASK_BYTES, ptr %set)
  br label %end
end:
  ret void
}

define internal void @pool.note.member(ptr %line) #0 {
  %thread = call i32 @gettid()
  %thread.at = getelementptr i64, ptr %line, i64 2
  store atomic i32 %thread, ptr %thread.at monotonic, align 8
  ret void
}

define internal void @pool.note.caller() #0 {
  %processor = call i32 @sched_getcpu()
  store atomic i32 %processor, ptr @pool.processor monotonic, align 4
  ret void
}
"""
WORDS = {"MASK_WORDS": MASK_WORDS, "MASK_BYTES": 8 * MASK_WORDS}


def is_wanted() -> bool:
    """Of many processors the system finds a free one itself."""
    return processors.are_few() and config.value("LTC_AFFINITY")
