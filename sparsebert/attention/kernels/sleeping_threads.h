// Threads that sleep between loops. Those of OpenMP wait busily for the next loop, which takes the processor from the
// threads of an inference engine that calls the operator.

#pragma once

#include <unistd.h>

#include <condition_variable>
#include <mutex>
#include <thread>

#include "arguments.h"

class SleepingThreads {
 public:
  using Function = void (*)(int64_t, int64_t, void*);

  // Calls function for ranges of [begin, end), on this thread and up to `count - 1` others. Alone on this one if the
  // others work for another caller.
  static void loop(int64_t begin, int64_t end, int64_t count, Function function, void* context) {
    static std::mutex creating;
    static SleepingThreads* threads = nullptr;  // never destroyed, since they run until the process ends
    static pid_t owner = 0;
    SleepingThreads* found;
    {
      std::lock_guard<std::mutex> lock(creating);
      if (owner != getpid()) {  // a fork has none of the threads of its parent
        threads = new SleepingThreads;
        owner = getpid();
      }
      found = threads;
    }
    std::unique_lock<std::mutex> busy(found->busy_, std::try_to_lock);
    count = busy ? std::min(count, end - begin) : 1;
    if (count > 1) found->run(begin, end, count, function, context);
    else if (begin < end) function(begin, end, context);
  }

 private:
  std::mutex busy_, mutex_;
  std::condition_variable wake_, finished_;
  int64_t number_ = 0, loops_ = 0, begin_ = 0, end_ = 0, count_ = 0, running_ = 0;
  Function function_ = nullptr;
  void* context_ = nullptr;

  void run(int64_t begin, int64_t end, int64_t count, Function function, void* context) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (; number_ < count - 1; ++number_) std::thread(&SleepingThreads::wait, this, number_ + 1, loops_).detach();
      begin_ = begin, end_ = end, count_ = count, function_ = function, context_ = context;
      running_ = count - 1;
      ++loops_;
    }
    wake_.notify_all();
    part(0);
    std::unique_lock<std::mutex> lock(mutex_);
    finished_.wait(lock, [&] { return running_ == 0; });
  }
  void part(int64_t i) {
    const int64_t size = end_ - begin_;
    function_(begin_ + size * i / count_, begin_ + size * (i + 1) / count_, context_);
  }
  void wait(int64_t i, int64_t seen) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return loops_ != seen; });
      seen = loops_;
      if (i >= count_) continue;
      lock.unlock();
      part(i);
      lock.lock();
      if (--running_ == 0) finished_.notify_one();
    }
  }
};
